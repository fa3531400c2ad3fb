"""Fixed features: patches and scattering fitted on generated images, public backbones, and their cache."""
