"""What a rate of tokens means for users, machines, watts and money: pure functions, every assumption in sight."""

from megatoken.planning.assumptions import Assumptions, load_assumptions
from megatoken.planning.capacity_plan import plan_capacity
from megatoken.planning.cost_plan import System, plan_cost
from megatoken.planning.energy_plan import Power, energy_of, plan_energy, power_given, power_of
from megatoken.planning.figures import Plan
from megatoken.planning.fleet_plan import Supply, load_demand, plan_fleet, plan_replacement
from megatoken.planning.pricing import parse_factor
from megatoken.planning.throughput import Throughput, from_number, from_runs
from megatoken.planning.workloads import Profile, lengths_csv, load_profiles

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
    "lengths_csv",
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
