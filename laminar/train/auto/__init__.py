"""What a job decides by itself: plans searched and tried out where it will run, units that change processes."""
