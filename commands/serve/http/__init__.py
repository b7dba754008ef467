"""HTTP alone: routes, limits on bodies, errors, and the OpenAPI document."""
