"""Every Triton kernel of the packages, compiled for GPUs that are not there.

`python -m integration_tests.acceptance.cubins` compiles what the real launchers would launch, and
what inductor writes for the compiled parts of hp-train, to cubins, with the assembler that the
wheel of Triton brings. It reads registers, stack, shared memory and size from the cubins and
compares them with `limits.toml`.
"""
