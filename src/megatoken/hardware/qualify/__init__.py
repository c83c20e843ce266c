"""Qualification of one machine: small tests, each with a bound, published or own references, and a verdict.

``catalog`` lists the tests, ``session`` runs each in a process of its own, ``judge`` gives the verdicts. Importing this
package does not load PyTorch; the processes of the tests do.
"""

from megatoken.hardware.qualify.session import qualify

__all__ = ["qualify"]
