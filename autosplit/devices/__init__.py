"""Devices to run on: specs, accelerators and their memory, the catalogue of GPUs, copies between devices.

May import the root. Begin with `spec` (the formats of ``devices=``) and `device` (the parsed result).
"""
