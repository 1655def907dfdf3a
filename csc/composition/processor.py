"""Texts, pictures and sound to batches of a composed model.

Terms
  mark      a modality's placeholder as it stands in a text, for example `<image>`: one mark an item, one token each
  answer    what the model is to say after the text; the labels are the answers' tokens

    processor = model.processor(tokenizer, {"vision": image_processor, "audio": feature_extractor})
    batch = processor(["<image> Who is it?"], answers=["a cat"], vision=[picture])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from csc.composition.modality import Composed, Modality
from csc.errors import InputError

IGNORED = -100  # the label that losses leave out


class Processor:
    """Texts, pictures and sound to batches of a composed model.

    Args:
        model: What the batches are for.
        tokenizer: An HF tokenizer whose vocabulary holds the placeholders.
        preprocessors: By modality, HF's image processors and feature extractors, with the sizes of the encoders.
        slots: By modality, how many items the batches have room for, whatever their samples have; without it a batch
            has room for those of its largest sample. With slots, all batches have the same entries, as a compiled step
            wants them.

    Raises:
        InputError: A modality has no preprocessor, or the tokenizer no padding token.
    """

    def __init__(
        self,
        model: Composed,
        tokenizer: Any,
        preprocessors: Mapping[str, Any],
        slots: Mapping[str, int] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.preprocessors = dict(preprocessors)
        self.slots = dict(slots or {})
        for given in (self.preprocessors, self.slots):
            for name in given:
                if name not in model.modalities:
                    raise InputError(
                        f"the model has no modality {name!r}", "processor", f"it has {', '.join(model.modalities)}"
                    )
        for name in model.modalities:
            if name not in self.preprocessors:
                raise InputError(
                    f"there is no preprocessor for {name!r}",
                    "processor",
                    "give an image processor or feature extractor for every modality",
                )
        if self.tokenizer.pad_token_id is None:
            raise InputError("the tokenizer has no padding token", "processor", "set tokenizer.pad_token")

    def __call__(
        self,
        texts: Sequence[str],
        answers: Sequence[str] | None = None,
        *,
        length: int | None = None,
        mask_prompt: bool = True,
        sampling_rate: int | None = None,
        **items: Sequence[Any] | None,
    ) -> dict[str, torch.Tensor]:
        """A batch: input_ids, attention_mask, labels (samples, length), and an entry for every modality given.

        Args:
            texts: One a sample, with a mark for every item.
            answers: One a sample; an end-of-sequence token follows if the tokenizer has one.
            length: Tokens to pad to on the right, after expansion; None: those of the longest sample.
            mask_prompt: Labels are the answers alone. False, or without answers: all text but marks and padding.
            sampling_rate: Of the sound, in Hz; None: the feature extractor's.
            **items: By modality, for each sample an item, a list of items, or None. Sound is mono, a 1-d array.

        Returns:
            The batch's entries.

        Raises:
            InputError: A sample is longer than `length` (nothing is cut off), or its marks are not its items.
        """
        if answers is not None and len(answers) != len(texts):
            raise InputError(f"{len(texts)} texts and {len(answers)} answers", "processor", "give one for each")
        for name in items:
            if name not in self.model.modalities:
                raise InputError(
                    f"the model has no modality {name!r}", "processor", f"it has {', '.join(self.model.modalities)}"
                )
        batch, tokens = {}, {}
        lists = {name: _lists(name, items.get(name), len(texts)) for name in self.model.modalities}
        for name, of_samples in lists.items():
            values = self._items(name, of_samples, sampling_rate)
            if values is not None:
                modality = self.model.modalities[name]
                tokens[name] = self.model.tokens(name, values.shape[-modality.kind.item_dims :])
                batch[modality.keyword] = values
        rows = [
            self._row(i, text, answers[i] if answers is not None else None, mask_prompt, lists, tokens)
            for i, text in enumerate(texts)
        ]
        return {**self._padded(rows, length), **batch}

    def _row(
        self,
        sample: int,
        text: str,
        answer: str | None,
        mask_prompt: bool,
        lists: Mapping[str, list[list[Any]]],
        tokens: Mapping[str, int],
    ) -> tuple[list[int], list[int]]:
        """(ids, labels) of a sample, every mark repeated for the tokens of its item."""
        marks = {it.placeholder: it for it in self.model.modalities.values()}
        ids: list[int] = []
        labels: list[int] = []
        prompt = list(self.tokenizer(text)["input_ids"])
        for it in marks.values():
            self._check_marks(sample, it, prompt.count(it.placeholder), len(lists[it.name][sample]))
        for token in prompt:
            count = tokens[marks[token].name] if token in marks else 1
            ids += [token] * count
            labels += [IGNORED if token in marks or (answer is not None and mask_prompt) else token] * count
        if answer is not None:
            said = list(self.tokenizer(answer, add_special_tokens=False)["input_ids"])
            for it in marks.values():
                self._check_marks(sample, it, said.count(it.placeholder), 0)
            if self.tokenizer.eos_token_id is not None:
                said.append(self.tokenizer.eos_token_id)
            ids += said
            labels += said
        return ids, labels

    def _check_marks(self, sample: int, it: Modality, found: int, expected: int) -> None:
        if found != expected:
            mark = self.tokenizer.convert_ids_to_tokens(it.placeholder)
            raise InputError(
                f"sample {sample} has {expected} items of {it.name!r}, and {found} marks {mark!r} in its text",
                "processor",
                f"write {mark!r} (token {it.placeholder}, which must be one token of the tokenizer) in the text, once "
                "for each item, and never in an answer",
            )

    def _padded(self, rows: Sequence[tuple[list[int], list[int]]], length: int | None) -> dict[str, torch.Tensor]:
        longest = max((len(ids) for ids, _ in rows), default=0)
        if length is not None and longest > length:
            sample = next(i for i, (ids, _) in enumerate(rows) if len(ids) > length)
            raise InputError(
                f"sample {sample} has {len(rows[sample][0])} tokens, and length is {length}",
                "processor",
                "give a larger length, or shorten the text; nothing is cut off",
            )
        shape = (len(rows), longest if length is None else length)
        ids = torch.full(shape, self.tokenizer.pad_token_id)
        mask, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
        for i, (row, said) in enumerate(rows):
            ids[i, : len(row)], labels[i, : len(said)] = torch.tensor(row), torch.tensor(said)
            mask[i, : len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def _items(self, name: str, lists: list[list[Any]], sampling_rate: int | None) -> torch.Tensor | None:
        """(samples, *item shape) for one slot, else (samples, slots, *item shape), empty slots zero; None: no items."""
        most = max((len(items) for items in lists), default=0)
        slots = self.slots.get(name, most)
        if most > slots:
            raise InputError(
                f"a sample has {most} items of {name!r}, and slots has room for {slots}",
                "processor",
                "raise slots, or give fewer",
            )
        if not slots:
            return None
        flat = [item for items in lists for item in items]
        values = self._preprocessed(name, flat or [self._blank(name)], sampling_rate)
        result = values.new_zeros(len(lists), slots, *values.shape[1:])
        start = 0
        for i, items in enumerate(lists):
            result[i, : len(items)] = values[start : start + len(items)]
            start += len(items)
        return result.squeeze(1) if slots == 1 else result

    def _preprocessed(self, name: str, flat: list[Any], sampling_rate: int | None) -> torch.Tensor:
        kind = self.model.modalities[name].kind
        preprocessor = self.preprocessors[name]
        if kind.input == "input_features":
            rate = preprocessor.sampling_rate if sampling_rate is None else sampling_rate
            return preprocessor(flat, sampling_rate=rate, return_tensors="pt")[kind.input]
        return preprocessor(images=flat, return_tensors="pt")[kind.input]

    def _blank(self, name: str) -> Any:
        """An item to learn the shape from, where a batch has none and slots wants some."""
        if self.model.modalities[name].kind.input == "input_features":
            return torch.zeros(1).numpy()
        return torch.zeros(32, 32, 3, dtype=torch.uint8).numpy()


def _lists(name: str, given: Sequence[Any] | None, samples: int) -> list[list[Any]]:
    """For each sample the list of its items."""
    if given is None:
        return [[] for _ in range(samples)]
    if len(given) != samples:
        raise InputError(
            f"{len(given)} entries of {name!r} for {samples} texts",
            "processor",
            "give one a sample: an item, a list of items, or None",
        )
    return [list(items) if isinstance(items, (list, tuple)) else [] if items is None else [items] for items in given]
