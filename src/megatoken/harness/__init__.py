"""From a scenario to a result: LoadGen, data sets, rules and verdict."""
