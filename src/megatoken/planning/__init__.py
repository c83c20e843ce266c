"""Turns a rate of tokens into users, machines, watts and money, and states every assumption."""
