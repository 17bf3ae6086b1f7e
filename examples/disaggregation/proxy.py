"""The proxy of `penstock demo-pd`, in front of instances that were started by hand.

python proxy.py --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200 [--bootstrap http://10.0.0.1:8998]
                [--style serial] [--host 127.0.0.1] [--port 8000] [--prefill-timeout 60]
"""

from __future__ import annotations

import argparse

from aiohttp import web

from penstock.router.proxy import STYLES, Instances, Proxy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, help="URL of the prefill instance")
    parser.add_argument("--decode", required=True, help="URL of the decode instance")
    parser.add_argument("--bootstrap", default="", help="where the prefill instance answers /query (style concurrent)")
    parser.add_argument("--style", choices=STYLES, default="serial")
    parser.add_argument("--prefill-timeout", type=float, default=60.0, help="seconds until decode computes the prompt")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    if args.style == "concurrent" and not args.bootstrap:
        parser.error("--style concurrent needs --bootstrap")
    proxy = Proxy(Instances(args.prefill, args.decode, args.bootstrap), args.style, args.prefill_timeout)
    web.run_app(proxy.app, host=args.host, port=args.port)


if __name__ == "__main__":
    main()
