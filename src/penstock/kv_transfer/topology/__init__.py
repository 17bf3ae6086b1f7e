"""Which bytes of one engine belong where in another: pure functions over declared layouts, for every kind of transfer.

`planner` decides who sends what (`sources`) and where its bytes lie on both sides (`plan_runs`); `pieces` says in which
order both sides digest them (`piece_runs`, `unit_runs`); `tables` keeps the engines that are known, by (engine id,
pipeline rank).

Layers are matched by name, heads by interval, tokens by runs that are contiguous on both sides. Pipeline and tensor
parallelism, block sizes and orders of axes may therefore differ in any way, without a case of their own. Nothing here
has threads, reads time or touches KV. What a peer declares is checked when it is registered (`layouts.check_layout`);
what does not fit raises PeerError and leaves no trace. Block ids that a peer sends are checked in every plan.
"""
