"""What candidates are expected to take: shallow models simulated, deep ones extrapolated, pipelines in closed form.

Good for ranking; what is to win is simulated at full depth by `planner/search`.
"""
