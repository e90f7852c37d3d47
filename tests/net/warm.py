"""Imported by the process that all others are forked from: what every one of them would import again.

Nothing is run backward here: autograd's threads do not survive a fork.
"""

import contextlib

import torch
import torch._inductor.compile_fx

import net.judge  # noqa: F401

with contextlib.suppress(ImportError):
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

torch.set_num_threads(1)
with torch.no_grad():
    torch.compile(torch.nn.Linear(2, 2).forward, backend="aot_eager")(torch.ones(1, 2))
torch._dynamo.reset()
