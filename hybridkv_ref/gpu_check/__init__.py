"""The check of one GPU: are the kernels right there, how fast are they, do graphs and the decoder hold.

``python -m hybridkv_ref.gpu_check --out DIR`` writes ``gpu_check.json`` and ``gpu_check.svg``.  It takes under four
minutes on one H200, downloads nothing, and gives no figure that it did not measure on a CUDA device.
"""
