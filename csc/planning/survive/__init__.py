"""What a job does when ranks fail: templates of replicas for every number of ranks, ways back, sums of gradients."""
