"""What holds for all tests."""

import torch

torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much where others use the processor too
