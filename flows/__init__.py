"""What Prefect executes. Lines of logs and the reasons of failures are kept by its server, so they
go there without secrets.
"""

import logging

from lachesis.base.secrets import redact_log_records

# without a level of its own nothing of it reaches the run's page
logging.getLogger("lachesis").setLevel(logging.INFO)
redact_log_records()
