"""ZeRO: optimizer states, gradients and parameters partitioned over ranks.

Read in this order: `layout` (where everything lies), `buffers` (the memory), `step` and `lifecycle` (what all stages
share), `optimizer` (stages 0 to 2), `engine` (stage 3). `partition` stands apart: plain helpers on lists of arrays.
"""
