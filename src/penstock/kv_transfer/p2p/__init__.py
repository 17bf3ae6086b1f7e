"""Disaggregation: one engine prefills, another decodes, and the KV is pulled between them.

params.py      reads the `kv_transfer_params` that proxies write
ticket.py      the signed proof that a client's request may read KV of another engine
messages.py    the messages between two engine cores, and from a core to its workers
producer.py    the sending half: which KV is held, which engine may read it, and for how long (sans-IO)
known_digests.py  which digests of a request's KV the workers have computed
consumer.py    the receiving half: from a request's parameters to KV that may be used (sans-IO)
channel.py     authenticated connections between engine cores, on a separate thread
peers.py       the cluster key, and the addresses that may be dialled
scheduler.py   the scheduler side of the connector: both halves behind one protocol
worker.py      the worker side: digests, reads, and checks of received KV
connector.py   `P2PConnector` with its options and its other names
"""
