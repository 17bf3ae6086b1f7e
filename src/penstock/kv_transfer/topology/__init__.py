"""Which bytes of one engine correspond to which of another: pure functions over declared layouts, for all transfers.

`planner` decides which shard sends what (`sources`) and where its bytes are on both sides (`plan_runs`); `pieces`
defines the order in which both sides digest them (`unit_runs`); `tables` keeps the known engines, by
(engine id, pipeline rank).

Layers are matched by name, heads by interval, tokens by runs that are contiguous on both sides. Pipeline and tensor
parallelism, block sizes and orders of axes may therefore differ in any way, without special cases. This package has no
threads, reads no clock and touches no KV. A peer's declarations are checked when it is registered
(`layouts.check_layout`); an incompatible one raises PeerError and changes nothing. A peer's block ids are checked in
every plan.
"""
