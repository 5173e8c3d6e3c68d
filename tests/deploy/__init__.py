"""What lies in deploy/: units, images, manifests, dashboards and alerts."""
