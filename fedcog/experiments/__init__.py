"""What is run and written down: experiments, comparisons, records, reports, deployments."""
