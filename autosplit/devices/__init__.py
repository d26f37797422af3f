"""Devices to run on: specs, accelerators and their memory, the catalogue of GPUs, copies between devices.

May import the root. Begin with `spec` (what ``devices=`` means) and `device` (the value that it gives).
"""
