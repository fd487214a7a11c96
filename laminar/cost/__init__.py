"""What a program costs on a cluster: prices, schedule, memory, simulation; predicted held against measured."""
