"""Our intervals beside what others offer: results/uncertainty-plan.md, in the order data, methods, scores, tables."""
