"""Who owns a point and who draws a patch: placement, assignment, plan, views."""
