"""HTTP alone: access, routes, limits on bodies, metrics, and the OpenAPI document."""
