"""The net: architectures built from their configs, trained a step under every inner compiler and way of planning, and judged.

table.py      what an architecture is, and all of them by name
dense.py, moe.py, recurrent.py, encoders.py, pairs.py, speech.py, vision.py, detection.py, multimodal.py,
diffusion.py, adapters.py, timm_models.py
              the architectures, a small builder each; random weights, tiny sizes, nothing is downloaded
precisions.py, attentions.py, losses.py, trainings.py
              kinds of training, on the decoder in small.py
step.py       one training step, and the bytes that autograd saved in it
judge.py      one architecture under one inner compiler: plain torch.compile and every way, each with its outcome
runner.py     each in a process of its own, with limits of time and memory: `python -m net.runner --help`
on_gpu.py     the same on a GPU, under stress: `python -m net.on_gpu --help`
page.py       the result files as docs/models.md
"""
