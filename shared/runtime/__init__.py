"""What every service needs around its own work: settings, logs, health, metrics, discovery, shutdown."""
