"""Devices to run on: specs, accelerators and their memory, the catalogue of GPUs, copies between devices.

Read `spec` (the formats of ``devices=``) and `device` (the parsed result) first.
"""
