"""From pictures to feature maps: finding a layer, reading images, keeping results, and a network with a fitted head."""
