"""The model in training that the trainer's tests have."""

from tests.trainer.conftest import policy as policy
