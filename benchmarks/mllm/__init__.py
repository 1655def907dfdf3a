"""The multimodal models of the pipeline benchmark in numbers: nine configurations, captured without weights."""
