"""What a plan says about itself: where its time goes, why it won, what others call it, what it looks like."""
