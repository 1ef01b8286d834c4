//go:build !race

package weirwatermill_test

const raceEnabled = false
