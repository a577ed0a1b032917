"""Copies that share what they hold with what they are copies of."""

from __future__ import annotations


def share(of: object, to: object) -> None:
    """Give ``to`` every attribute of ``of``, of the same class.

    What ``copy.copy`` does; but that cannot make an instance of a class that is compiled, which tells its attributes'
    names in another place as well.
    """
    for name in getattr(of, "__mypyc_attrs__", None) or vars(of):
        setattr(to, name, getattr(of, name))
