"""The communicators that most of these tests run with."""

from shared_fixtures import communicators

comm = communicators('naive', 'flat')
