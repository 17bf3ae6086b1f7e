"""Disaggregation: one engine prefills, another decodes, and the KV is pulled between them.

params.py      what proxies write into `kv_transfer_params`, and what an engine answers
ticket.py      the proof that a client's request may read KV of another engine
messages.py    what two engine cores say to each other, and what a core tells its workers
producer.py    the sending half: what is held, who may read it, and for how long (sans-IO)
consumer.py    the receiving half: from a request's parameters to KV that may be used (sans-IO)
channel.py     authenticated connections between engine cores, on a thread of their own
peers.py       the cluster key, and which addresses are engines
scheduler.py   the scheduler side of the connector: both halves behind one protocol
worker.py      the worker side: digests, reads, and the check of what has landed
connector.py   `P2PConnector` with its options, and the names that other engines' users write
"""
