"""Run `lachesis notifications`: set or remove the web address that the Prefect server calls."""

from __future__ import annotations

import argparse

from lachesis.cli.console import print_answer
from lachesis.prefect_client.notifications import remove_notifications, set_notifications


def handle_notifications(args: argparse.Namespace) -> None:
    """Set or remove the web address that the Prefect server calls."""
    if args.remove:
        names = remove_notifications()
    else:
        names = set_notifications(args.webhook)
    outcome = "removed" if args.remove else f"call {args.webhook}"
    print_answer(
        args,
        {"automations": names, "webhook": args.webhook},
        f"{', '.join(names) or 'no automation'}: {outcome}",
    )
