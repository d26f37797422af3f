"""The answer: its values, JSON, validity and explanation; its settings for other tools; the verbs that use it.

May import the root, devices, solve and probe.check_result; parallel and runtime within the verbs that use them. Begin
with `record` (the values) and `plan` (the verbs).
"""
