"""Who does what: clusters, stages, segments and rings. Pure decisions on facts."""
