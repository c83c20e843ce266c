"""Turns a rate of tokens into users, machines, watts and money, and states every assumption."""

from megatoken.planning.assumptions import Assumptions, load_assumptions
from megatoken.planning.capacity import plan_capacity
from megatoken.planning.cost import System, plan_cost
from megatoken.planning.energy import Power, energy_of, plan_energy, power_given, power_of
from megatoken.planning.figures import Plan
from megatoken.planning.fleet_plan import Supply, load_demand, plan_fleet, plan_replacement
from megatoken.planning.pricing import parse_factor
from megatoken.planning.throughput import Throughput, from_number, from_runs
from megatoken.planning.workloads import Profile, load_profiles

__all__ = [
    "Assumptions",
    "Plan",
    "Power",
    "Profile",
    "Supply",
    "System",
    "Throughput",
    "energy_of",
    "from_number",
    "from_runs",
    "load_assumptions",
    "load_demand",
    "load_profiles",
    "parse_factor",
    "plan_capacity",
    "plan_cost",
    "plan_energy",
    "plan_fleet",
    "plan_replacement",
    "power_given",
    "power_of",
]
