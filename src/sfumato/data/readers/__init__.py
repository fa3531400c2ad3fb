"""Files to tensors: folders, manifests, binary sets, single images."""
