"""ZeRO: optimizer states, gradients and parameters partitioned over ranks.

Read in this order: `layout` (where everything lies), `buffers` (the memory), `optimizer` (stages 0 to 2), `engine`
(stage 3), `step` (what all stages share). `partition` stands apart: plain helpers on lists of arrays.
"""
