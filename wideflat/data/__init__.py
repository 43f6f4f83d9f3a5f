"""The data sets: embedded Dress-vs-Coat, CIFAR-10/100, Tiny ImageNet, Fashion-MNIST; and augmentation."""
