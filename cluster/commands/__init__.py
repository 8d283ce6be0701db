"""What the commands of `baton` do; cluster/cli.py declares them."""
