"""Who calls: API keys, what their tenants may do, and what they have used."""
