"""torchtitan 0.3 and newer: each configuration of its models, planned.

    torchrun --nproc_per_node 8 -m torchtitan.train --module graphoffload.integrations.torchtitan --config llama3_8b

`config_registry` is what torchtitan asks for a configuration by its name.
"""
