//go:build pinned

// Package pinned imports the packages of the modules that go.mod pins, so that `go mod tidy` keeps the modules.
package pinned

import (
	_ "github.com/twmb/franz-go/pkg/kadm"
	_ "github.com/twmb/franz-go/pkg/kfake"
	_ "github.com/twmb/franz-go/pkg/kgo"
	_ "github.com/twmb/franz-go/pkg/kmsg"
)
