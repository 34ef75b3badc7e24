"""Triton kernels: device functions per stage, and the two kernels that call them.

``persistent.py`` runs every stage of every layer and step in one launch, with a grid barrier
between stages; ``staged.py`` runs one stage per launch. Both call the same device functions, so the
interpreter, which runs programs one after another, can check each stage at any grid.

Words that mean one thing each, here and everywhere else in the project:

talker          the 28-layer decoder that predicts codebook 0 of the next frame
code predictor  the 5-layer decoder that predicts the other codebooks of a frame
codec head      the talker's output matrix (``lm_head`` of its spec)
codec           the network that turns codes into samples
frame           80 ms of audio, one code per codebook
step            one token through the talker; what one iteration of the persistent kernel computes
pass            one token through the code predictor
stage           a part of a layer between two grid barriers (``schedule.STAGES``)
tile            the block of a weight matrix that a program holds in registers at a time
program         one Triton program; it stays resident for the whole launch
split           a contiguous part of the cache rows that one program attends to
barrier         the point where every program waits for every other
tape            weights packed in the order of their use
ring            shared-memory buffers that weights are streamed through
chunk           frames per launch
"""
