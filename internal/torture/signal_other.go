//go:build !unix

package torture

import (
	"errors"
	"os/exec"
)

const canSignal = false

func apart(*exec.Cmd) {}

func killProcess(int) error   { return errors.ErrUnsupported }
func stopProcess(int) error   { return errors.ErrUnsupported }
func resumeProcess(int) error { return errors.ErrUnsupported }
