"""HTTP alone: access, routes, limits on bodies, and the OpenAPI document."""
