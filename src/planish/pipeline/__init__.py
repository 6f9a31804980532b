"""Order: schedules are data that is printed, validated, simulated and then run over stages."""
