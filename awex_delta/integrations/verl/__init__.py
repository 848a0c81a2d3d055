"""verl: a checkpoint engine, and the training engines that hand it the optimizer. See docs/en/verl.md."""
