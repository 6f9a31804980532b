"""Schedules at run time: torch.distributed.pipelining's stages and action loop, with the vocabulary on all ranks."""
